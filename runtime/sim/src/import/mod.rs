//! Published tables of kernel times as profiles of devices.
//!
//! `aiconfigurator` reads the tables of ai-dynamo/aiconfigurator, and `engine` takes the operations out of a
//! serving engine's profile; `device` makes a profile of such points and says how well they predict each
//! other. Formats and columns are documented in docs/reference/profile-format.md.

mod aiconfigurator;
mod device;
mod engine;
mod table;

pub use aiconfigurator::{KernelTables, TableChoice, TableSet};
pub use device::{HeldOut, TableOrigin, device_profile};
pub use engine::operations;
