"""Folders at remote addresses: read file by file, and published so that nobody takes a half for a whole.

- `address`: `s3://bucket/folder`, `hf://datasets/owner/name@revision`
- `remote_folder`: the interface of a folder at an address
- `s3_folder`: a folder in a bucket of S3, by fsspec's s3fs; failures of S3 as errors for the user
- `checkpoint`: a checkpoint at an address, its shards fetched when they are needed
- `cache`: the folder on this machine that keeps what was fetched
"""
