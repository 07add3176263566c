"""Folders at remote addresses: read file by file, and published so that nobody takes a half for a whole.

- `address`: `s3://bucket/folder`, `hf://datasets/owner/name@revision`, and the interface of a folder there
- `s3_folder`: a folder in a bucket of S3, by fsspec's s3fs; a checkpoint there, its shards fetched when needed
- `cache`: the folder on this machine that keeps what was fetched
"""
