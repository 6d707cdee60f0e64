"""What the tables and figures of the superposed-decoding paper show, measured on the demo backbone."""
