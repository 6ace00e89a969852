//! What the crate says from outside: its catalog and its predictions against published data.

mod catalog_data;
mod forward;
mod laws;
mod predict;
mod published;
