"""Files of a Hugging Face hub's repository, fetched and verified.

- `checkpoint_folder`: the folder of a checkpoint, local or fetched; other rooms begin here
- `dataset_folder`: a folder in a dataset; folders at addresses of any scheme
- `snapshot`: one commit's files in the cache, fetched by huggingface_hub and verified; byte ranges
- `access`: the hub, a commit, a file, and their place in the cache; failures, new attempts, errors for the user
"""
