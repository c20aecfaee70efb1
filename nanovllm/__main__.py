"""`python -m nanovllm`: the command."""

import sys

from nanovllm.command.main import main

if __name__ == "__main__":
    sys.exit(main())
