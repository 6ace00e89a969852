//! Prompts in several steps.

use super::*;

#[test]
fn a_long_prompt_runs_in_chunks_beside_decodes() {
    let mut driver = Driver::new(LIMITS);
    driver.add(1, vec![1, 2, 3], 20, After::Decode);
    driver.turn();
    driver.add(2, (0..30).collect(), 1, After::Decode);
    let mut actions = Vec::new();
    driver.machine.step(Event::Idle, &mut actions);
    let Some(Action::Run(step)) = actions.last() else { panic!("{actions:?}") };
    let parts: Vec<_> = step.sequences.iter().map(|s| (s.request, s.tokens, s.sample)).collect();
    assert_eq!(parts, [(1, 1, true), (2, 6, false)]);
}

#[test]
fn rows_of_known_tokens_share_steps_and_memory_for_logits() {
    let mut driver = Driver::new(LIMITS);
    driver.add(1, vec![1, 2, 3], 12, After::Decode);
    driver.turn();
    let mut whole = vec![5];
    (0..15).for_each(|_| whole.push(whole.iter().sum::<u32>() % 997));
    driver.requests.insert(2, (vec![5], 18));
    let (urgency, text) = (Urgency::due_at(Seconds::ZERO), text(vec![5]).with_forced(1, whole[1..].into()));
    driver
        .machine
        .step(Event::Add { request: 2, urgency, text, pulls: 0, after: After::Decode }, &mut vec![]);
    let mut lengths = Vec::new();
    while !driver.finished.contains(&2) {
        assert!(driver.turn());
        lengths.push(driver.requests[&2].0.len());
    }
    // six rows a step, of which another sequence has one; the last token is drawn alone
    assert_eq!(lengths, [6, 11, 16, 17, 18]);
    assert_eq!(driver.requests[&2].0[..16], whole);
}

#[test]
fn known_tokens_preempt_nobody_and_survive_preemption() {
    let limits = BatchLimits { blocks_total: 16, ..LIMITS };
    let mut driver = Driver::new(limits);
    driver.add(1, (0..12).collect(), 16, After::Decode);
    driver.add(2, (1..13).collect(), 16, After::Decode);
    let mut whole = vec![7];
    (0..29).for_each(|_| whole.push(whole.iter().sum::<u32>() % 997));
    driver.requests.insert(3, (vec![7], 34));
    let (urgency, text) = (Urgency::due_at(Seconds::ZERO), text(vec![7]).with_forced(1, whole[1..].into()));
    driver
        .machine
        .step(Event::Add { request: 3, urgency, text, pulls: 0, after: After::Decode }, &mut vec![]);
    while driver.finished.len() < 3 {
        assert!(driver.turn());
    }
    assert_eq!(driver.requests[&3].0[..30], whole);
    assert!(driver.preemptions > 0, "too much memory for this test");
}
