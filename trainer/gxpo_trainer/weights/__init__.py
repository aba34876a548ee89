"""Weight sync: the learner publishes a version in buckets; every engine loads and verifies them.

Each transport has a publisher in the learner, and a counterpart in the engine workers. The learner packs bucket i while
the engines load bucket i-1. After the last bucket each worker reads every tensor back, packed copies included, and
compares checksums with what was published; only then does the engine serve the new version. The number of syncs is
part of the prefix cache's key, so blocks of earlier weights are never reused. With LoRA the base weights stay, and the
adapter is sent in the same buckets.
"""
