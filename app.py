"""Gainz: start it with ``python app.py``, then open the address it prints. ``python app.py --help`` lists the commands."""

import sys

if sys.version_info < (3, 11):  # plain syntax up to here, so that an old Python gets to this line
    sys.stderr.write("Gainz needs Python 3.11 or newer; this is %d.%d. Start it with a newer one, for instance: "
                     "python3.11 app.py\n" % sys.version_info[:2])
    sys.exit(2)

if __name__ == "__main__":
    from gainz_ui.cli import main

    sys.exit(main())
