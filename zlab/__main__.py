"""`python -m zlab` is the command `zlab`."""

from zlab import main

if __name__ == "__main__":
    main()
