"""`python -m zlab` runs the command `zlab`."""

from zlab.cli.main import main

if __name__ == "__main__":
    main()
