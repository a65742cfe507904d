"""Link: keeps the records of an attempt in step between hosts that share no file system."""
