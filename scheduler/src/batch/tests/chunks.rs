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
