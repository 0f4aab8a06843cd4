//! What a person sees while the demo runs: one line that moves on a terminal, plain lines elsewhere.

use crate::scenario::STEPS;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How far the demo is.
pub struct Progress {
    bar: Option<ProgressBar>,
    name: String,
    begin: Instant,
}

impl Progress {
    /// For so many machines.
    pub fn new(machines: usize) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((machines * STEPS.len()) as u64);
            let style =
                ProgressStyle::with_template("{spinner} [{elapsed_precise}] {bar:30} {pos}/{len}  {msg}");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Progress { bar, name: String::new(), begin: Instant::now() }
    }

    /// Something that is not a step of a machine.
    pub fn say(&mut self, what: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(what.to_string()),
            None => eprintln!("demo: [{:>4.0} s] {what}", self.begin.elapsed().as_secs_f64()),
        }
    }

    /// Something that is to stay on the screen.
    pub fn note(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.println(what),
            None => eprintln!("demo: {what}"),
        }
    }

    /// A machine starts.
    pub fn machine(&mut self, name: &str) {
        self.name = name.to_string();
        self.say(&format!("{name}: booting"));
    }

    /// A machine has done a step.
    pub fn step(&mut self, step: &str) {
        let done = STEPS.iter().find(|(key, _)| *key == step).map_or(step, |(_, what)| *what);
        self.say(&format!("{}: {done}", self.name));
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// The end.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
