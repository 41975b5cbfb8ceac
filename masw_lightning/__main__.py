"""``python -m masw_lightning`` is the ``masw`` command."""

from masw_lightning.cli import main

if __name__ == "__main__":
    main()
