"""An application of Django with the tables of `publish_in` and `job.once`: add `reliq.contrib.django` to INSTALLED_APPS."""
