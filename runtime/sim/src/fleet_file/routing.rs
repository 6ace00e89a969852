//! The routers that share the requests.

/// The routers before a fleet.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// How many; at least one.
    pub count: u32,
    /// From a router's word to an instance until the other routers know of it, in seconds.
    pub delay_s: f64,
}

impl Routing {
    /// More would each have next to nothing to decide.
    pub const COUNT_MAX: u32 = 64;
}

impl Default for Routing {
    /// One router; word of another would take two ways through a data centre's network.
    fn default() -> Self {
        Routing { count: 1, delay_s: 1e-3 }
    }
}
