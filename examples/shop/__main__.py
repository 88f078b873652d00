"""Run the demonstration of the shop; if a package is missing, print how to install it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from stage import installed_by

with installed_by("pip install '.[embedded,sqlalchemy,web]' fastapi httpx"):
    import fastapi  # noqa: F401  the web application needs it
    import uvicorn  # noqa: F401  the web server

    from shop.story import main

if __name__ == "__main__":
    main()
