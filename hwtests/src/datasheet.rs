//! Which part of the catalog a device is.

use mixfleet_hal::catalog::{Part, part, part_of_driver};

/// Returns the part of the catalog that a driver calls `name`, or that a simulated device stands for.
pub(crate) fn catalog_part(name: &str) -> Option<&'static Part> {
    part_of_driver(name).or_else(|| part(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_known_by_its_driver_its_id_and_as_a_simulated_one() {
        for name in ["NVIDIA GeForce RTX 4090", "simulated NVIDIA GeForce RTX 4090", "rtx-4090"] {
            assert_eq!(catalog_part(name).map(|part| part.id), Some("RTX-4090"), "{name}");
        }
        assert_eq!(catalog_part("loops in C"), None);
    }
}
