"""Studies: several arms, each at its own best learning rate, on several seeds and one budget of backward passes.

`definition` is a study's file and the runs that it asks for, `runner` executes what is missing, `data` keeps the
results as Parquet, `findings` computes what the page states, `report` writes it with its pictures.
"""
