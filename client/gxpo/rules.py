"""The update rules' settings under the names of their papers: `gxpo.rules.GXPO(k=5)`."""

from gxpo_trainer.config.rules import EpochsRule, ExtragradientRule, GrpoRule, GxpoRule, SfpoRule

GRPO = GrpoRule
SFPO = SfpoRule
GXPO = GxpoRule
Epochs = EpochsRule
Extragradient = ExtragradientRule
