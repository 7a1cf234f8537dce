"""`python -m bidikv_server.cli`."""

from bidikv_server.cli import main

if __name__ == "__main__":
    main()
