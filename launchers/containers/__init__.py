"""Kit for backends whose attempts are containers that share nothing but a network and an object store.

A backend renders `rendering.container_config`, brings `archive.stage` and `attempt.upload_inputs` to the
object store, has its containers start `archive.entry_program`, and reads `attempt.read_records` and `output.text_of`.
"""
