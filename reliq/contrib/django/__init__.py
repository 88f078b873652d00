"""
The Django application of reliq: the tables for `Queue.publish_in` and `job.once`, with migrations.

Add "reliq.contrib.django" to INSTALLED_APPS and run `manage.py migrate`.
"""
