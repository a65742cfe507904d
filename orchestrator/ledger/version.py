"""The schema version this code works with: the newest revision below `migrations/versions`."""

HEAD = "0007"
