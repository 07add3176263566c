"""Planted ports: ten decoder layers with one mistake each, for the measurement of skills/mm2.

- `layer`: the right port, whose text every case changes at one place
- `cases`: the ten changes, their names and their repairs
"""
