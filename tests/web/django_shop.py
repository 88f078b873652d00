"""A shop in Django with the pages mounted: `python django_shop.py PORT` serves it until a signal, with three users."""

import sys

PREFIX, LOGIN, PASSWORD = "/ops/reliq", "/admin/login/", "a password"
MIDDLEWARE = (
    "sessions.middleware.SessionMiddleware",
    "auth.middleware.AuthenticationMiddleware",
    "messages.middleware.MessageMiddleware",
)
PROCESSORS = ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth"]
PROCESSORS += ["django.contrib.messages.context_processors.messages"]
APPS = ("admin", "auth", "contenttypes", "messages", "sessions")
urlpatterns = []


def serve(port):
    import django
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.core.management import call_command

    settings.configure(
        SECRET_KEY="the first one",
        INSTALLED_APPS=[f"django.contrib.{one}" for one in APPS],
        MIGRATION_MODULES=dict.fromkeys(APPS),  # create tables without migrations
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
        MIDDLEWARE=[f"django.contrib.{one}" for one in MIDDLEWARE],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": PROCESSORS},
            }
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF=__name__,
        STATIC_URL="static/",
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)

    import uvicorn
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.urls import path

    from reliq import web
    from reliq.contrib.django.users import user_of

    urlpatterns.append(path("admin/", admin.site.urls))
    User.objects.create_superuser("ada", password=PASSWORD)
    User.objects.create_user("bob", password=PASSWORD, is_staff=True)
    User.objects.create_user("carl", password=PASSWORD)

    async def access(request):
        if "x-another-secret" in request.headers:
            settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another one", ["the first one"]
        user = await user_of(request)
        if not user.is_staff:
            return web.Access.NONE
        return (web.Access.WRITE if user.is_superuser else web.Access.READ).by(user.get_username())

    shop, pages = get_asgi_application(), web.app(access=access, login=LOGIN)

    async def application(scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith(PREFIX + "/"):
            await pages({**scope, "root_path": PREFIX}, receive, send)
        else:
            await shop(scope, receive, send)

    uvicorn.run(application, port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
