"""The handlers of a consumer: what each is registered with, and the job that it is given."""
