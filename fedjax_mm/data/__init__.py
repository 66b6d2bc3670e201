"""Client data: sources, partitions, flat storage and sampling on the device."""
