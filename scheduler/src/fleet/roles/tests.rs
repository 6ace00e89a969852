use super::super::tests::{act, arrival, arrive, config, fleet, instance};
use super::super::{Event, FleetConfig, Instance};
use super::*;

/// 1 ms per prompt token and 10 ms per step, in pool 1.
fn flexible(id: u32, role: Role) -> Instance {
    Instance { pool: 1, kv_capacity_tokens: 1000, ..instance(id, role, 1e-3, 1e-2) }
}

/// Prompts of a second load a side fully when each of its instances has one.
fn rebalancing(roles: &[Role]) -> Fleet {
    let rule = Rebalance { high: 0.8, low: 0.6, hold: Seconds(10.0), pools: vec![1] };
    let config = FleetConfig { rebalance: Some(rule), tbt_slo: Some(Seconds(1.0)), ..config() };
    fleet(config, (1..).zip(roles).map(|(id, &role)| flexible(id, role)).collect())
}

/// Keeps prompts of a second coming on each of `busy` instances for `seconds`; the roles that change, with
/// the time.
fn prompts(f: &mut Fleet, busy: u32, from_s: u32, seconds: u32) -> Vec<(u32, InstanceId, Role)> {
    let mut changes = Vec::new();
    for at_s in from_s..from_s + seconds {
        for copy in 0..busy {
            let request = u64::from(at_s * 10 + copy);
            // two seconds' work for two seconds
            let arrived = arrival(request, 900, request);
            let actions = act(f, f64::from(at_s), Event::Arrived(arrived));
            for action in actions {
                if let Action::SetRole { instance, role } = action {
                    changes.push((at_s, instance, role));
                }
            }
            if at_s > from_s {
                act(f, f64::from(at_s), Event::Cancelled { request: request - 10 });
            }
        }
    }
    changes
}

#[test]
fn a_side_without_rest_gets_one_of_the_idle_side_and_never_its_last() {
    use Role::{Decode, Prefill};
    let mut f = rebalancing(&[Prefill, Decode, Decode]);
    assert_eq!(prompts(&mut f, 3, 0, 60), [(10, InstanceId(2), Prefill)]);
    // one prefill instance of two busy: none has too much, none enough to spare
    assert_eq!(prompts(&mut f, 1, 60, 60), []);
    let roles: Vec<Role> = f.instances().map(|instance| instance.role).collect();
    assert_eq!(roles, [Prefill, Prefill, Decode]);
}

#[test]
fn full_decoders_get_an_idle_prefill_instance_that_then_takes_no_prompts() {
    use Role::{Decode, Prefill};
    let mut f = rebalancing(&[Prefill, Prefill, Decode]);
    let mut changes = Vec::new();
    for request in 0..30 {
        let now = f64::from(request as u32);
        // 95 of the decoder's 1000 tokens each
        let actions = act(&mut f, now, Event::Arrived(arrival(request, 94, request)));
        let Some(Action::Place { prefill, decode, .. }) = actions.last() else { continue };
        assert!(changes.is_empty() || prefill.0 == 2, "{actions:?}");
        act(&mut f, now, Event::PrefillDone { request, instance: *prefill });
        act(&mut f, now, Event::TransferDone { request, instance: *decode });
        changes.extend(actions.iter().filter_map(|action| match action {
            Action::SetRole { instance, role } => Some((*instance, *role)),
            _ => None,
        }));
    }
    assert_eq!(changes, [(InstanceId(1), Decode)]);
}

#[test]
fn pools_that_are_not_flexible_and_fleets_without_a_rule_stay_as_they_are() {
    let mut f = rebalancing(&[Role::Prefill, Role::Decode, Role::Decode]);
    f.config.rebalance = Some(Rebalance { pools: vec![7], ..f.config.rebalance.unwrap() });
    assert_eq!(prompts(&mut f, 3, 0, 40), []);
    f.config.rebalance = None;
    assert_eq!(prompts(&mut f, 3, 40, 40), []);
    arrive(&mut f, 100.0, arrival(9999, 10, 1));
}
