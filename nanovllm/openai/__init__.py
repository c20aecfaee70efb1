"""The request and response formats of OpenAI's API."""
