"""Kit for backends whose attempts are containers that share nothing but a network and an object store.

A backend renders `layout.container_config`, brings `inputs.stage` and `inputs.upload_inputs` to the object store, has
its containers start `inputs.entry_program`, and reads `inputs.read_records` and `output.text_of`.
"""
