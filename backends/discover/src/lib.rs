//! What a machine is made of.
