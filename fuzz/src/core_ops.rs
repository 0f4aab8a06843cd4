//! Requests, completions, faults, crashes and resets in the order that the input says, on the model test's small
//! disk and against its record of what was written.

use crate::{rng, run::Run};

/// Steps of one input at most, so that bytes that decide little do not take long.
const STEPS: usize = 4096;
/// The same for a disk of several regions, whose self-check takes longer.
const STEPS_LARGE: usize = 256;

/// The model test, decided by the input.
pub fn core_ops(data: &[u8]) {
    rng::decide(data);
    let mut run = Run::new(1);
    for step in 1..=if run.is_large() { STEPS_LARGE } else { STEPS } {
        if rng::undecided() == 0 {
            break;
        }
        run.step();
        if step % 64 == 0 {
            run.check();
        }
    }
    rng::decide(&[]);
    run.read_all();
}
