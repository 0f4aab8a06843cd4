//! Generation after generation, each with patterns of its own: none ever shows in a later one, by no path.
//!
//! Every write of a run has its own version; the oracle takes none from before the last reset for an answer, and
//! the stand-in for the worker none in a slot that is handed out.

use crate::run::{self, Run};
use spillway_core::{BLOCK_BYTES, DiskSpec, Mode};

/// Some of everything, with faults: whole and partial writes, merges that fail, evictions, discards.
fn fill(run: &mut Run, requests: usize) {
    run.sim.faults = 3_000;
    for i in 0..requests {
        run.submit();
        if i % 3 == 0 {
            run.turn();
        }
        run.end_operation();
    }
}

#[test]
fn ten_thousand_generations() {
    // What is the disk's own from its birth has no reset.
    for mode in Mode::ALL.into_iter().filter(|&mode| mode != Mode::Ephemeral) {
        let spec = DiskSpec {
            size_bytes: 48 * BLOCK_BYTES as u64,
            base_bytes: 20 * BLOCK_BYTES as u64,
            ram_limit_bytes: if mode.has_ram() { 16 * BLOCK_BYTES as u64 } else { 0 },
            ..run::full_spec(mode)
        };
        let mut run = Run::with(spec, 17);
        run.faulty = true;
        for generation in 0..10_000 / Mode::ALL.len() {
            fill(&mut run, 12);
            run.reset();
            match generation % 4 {
                // Before any memory is back, of all or of some blocks: from slots that still hold the old content.
                0 => run.read_all(),
                1 => run.crash(),
                _ => {}
            }
        }
        run.read_all();
    }
}

/// A disk of so many regions that its map is given back in many steps; processes die between these.
#[test]
fn a_reset_is_finished_by_who_comes_after() {
    const REGIONS: u64 = 300;
    let spec = DiskSpec {
        size_bytes: REGIONS << 21,
        ram_limit_bytes: 2 * REGIONS * BLOCK_BYTES as u64,
        ..run::full_spec(Mode::Ram)
    };
    let mut run = Run::with(spec, 23);
    for generation in 0..6 {
        for region in 0..REGIONS {
            run.write_block(region * 512 + generation);
            // Every second region is mapped again before its old page is given back.
            if region % 2 == 0 && generation > 0 && region % 64 == 0 {
                run.turn();
            }
        }
        run.settle();
        assert_eq!(run.sim.held_slots, REGIONS as u32);
        run.reset();
        for region in (0..REGIONS).step_by(2) {
            run.write_block(region * 512 + 100 + generation);
        }
        let mut steps = 0;
        while run.turn() {
            steps += 1;
            if steps % 2 == 0 && steps < 40 {
                run.crash();
            }
        }
        assert!(steps > 2, "it was one step");
        run.settle();
        run.check();
        assert_eq!(run.sim.held_slots, REGIONS as u32 / 2, "slots hold memory that is not in use");
        assert_eq!(run.map_pages_held(), REGIONS / 2, "map pages hold memory that is not in use");
        // The second waits until the first's memory is back, or the directory of the one before would count again.
        run.reset();
        run.reset();
    }
}
