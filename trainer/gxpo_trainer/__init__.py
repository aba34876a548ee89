"""gxpo trains language-model policies on verifiable problems with GRPO, SFPO and GXPO."""

__version__ = "0.1.0"
