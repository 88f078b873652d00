"""A Django application with the tables for `publish_in` and `job.once`. Add `reliq.contrib.django` to INSTALLED_APPS."""
