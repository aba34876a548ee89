"""Weight sync: the learner publishes a version, the sampler loads it and proves that it did.

Three transports behind one pair of verbs, `publish` on the learner and `receive` on the sampler:

    SharedMemoryPublisher   one host: a flat buffer under /dev/shm that the sampler maps
    ObjectStorePublisher    between hosts: the same buffer through Ray's object store
    NcclPublisher           between GPUs: vLLM's weight transfer

The order of one sync, which nothing may change: publish(version) returns a manifest; the sampler, idle, loads
the tensors, packs what vLLM keeps packed, reads every tensor back and compares it with the manifest; only then
does it answer for the new version. A sampler that failed half-way holds no version. `num_syncs` goes into the key
of the sampler's prefix cache, so no entry of earlier weights can be found again.

The proof: the checksum of what was read back is that of what was published, tensor by tensor. It weights bits by
position, so a change in the last bit, a shift and an exchange of two equal-shaped tensors all show.
"""
