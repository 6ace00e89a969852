//! The routers that share the requests.

/// The routers before a fleet.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// How many; at least one.
    pub count: u32,
    /// Seconds from a router's message to an instance until the other routers know of it.
    pub delay_s: f64,
}

impl Routing {
    /// More would each have next to nothing to decide.
    pub const COUNT_MAX: u32 = 64;
}

impl Default for Routing {
    /// One router; a message of another would cross a data centre's network twice.
    fn default() -> Self {
        Routing { count: 1, delay_s: 1e-3 }
    }
}
