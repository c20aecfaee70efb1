"""What every floor uses: checks of arguments, and Ctrl-C put off."""
