"""Weight sync: the learner publishes a version; the sampler loads it and verifies it.

Three transports with the same interface, `publish` on the learner and `receive` on the sampler:

    SharedMemoryPublisher   one host: a flat buffer under /dev/shm that the sampler maps
    ObjectStorePublisher    between hosts: the same buffer through Ray's object store
    NcclPublisher           between GPUs: vLLM's weight transfer

Order of one sync: publish(version) returns a manifest; the idle sampler loads the tensors, repacks the layers that
vLLM keeps packed, reads every tensor back and compares its checksum with the manifest; only then does it serve the
new version. After a failed sync it holds no version. `num_syncs` is part of the prefix cache's key, so blocks of
earlier weights are never reused.

Checksums weight bits by position, so they detect a changed last bit, a shift and an exchange of two tensors.
"""
