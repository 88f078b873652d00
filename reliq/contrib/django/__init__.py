"""
A Django application with migrations for the outbox and inbox tables, which `Queue.publish_in` and `job.once` need.

Add "reliq.contrib.django" to INSTALLED_APPS and run `manage.py migrate`.
"""
