"""The magic numbers of images whose messages are here, by pycriu's names."""

by_name = {
    "INVENTORY": 0x58313116,
    "PSTREE": 0x50273030,
    "CORE": 0x55053847,
    "IDS": 0x54432030,
    "MM": 0x57492820,
    "FDINFO": 0x56213732,
    "FILES": 0x56303138,
    "MNTS": 0x55563928,
    "CGROUP": 0x59383330,
    "PIPES_DATA": 0x56453709,
    "FIFO_DATA": 0x59333054,
    "SK_QUEUES": 0x56264026,
    "TCP_STREAM": 0x51465506,
    "IPCNS_SHM": 0x46283044,
    "IPCNS_SEM": 0x59573019,
    "IPCNS_MSG": 0x55453737,
    "BPFMAP_DATA": 0x64324033,
    "PAGEMAP": 0x56084025,
}
by_val = {number: name for name, number in by_name.items()}
