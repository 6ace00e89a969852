use super::tests::{act, config, fleet, instance};
use super::*;

#[test]
fn a_fleet_serves_while_one_instance_can_do_both_or_a_link_joins_two_that_can() {
    let (prefill, decode) = (instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2));
    let serves = |instances: &[&Instance]| {
        let instances = instances.iter().map(|&instance| instance.clone()).collect();
        fleet(config(), instances).can_serve()
    };
    let both = instance(3, Role::Auto, 1e-3, 1e-2);
    assert!(serves(&[&both]) && serves(&[&prefill, &decode]) && serves(&[&prefill, &both]));
    assert!(!serves(&[]) && !serves(&[&prefill]) && !serves(&[&decode]));
    let mut fleet = fleet(config(), vec![prefill, decode]);
    act(&mut fleet, 1.0, Event::LinkDown { from: InstanceId(1), to: InstanceId(2) });
    assert!(!fleet.can_serve());
}
