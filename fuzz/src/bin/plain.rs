//! Runs the fuzz targets without libFuzzer: their seeds, the inputs that once failed, and random changes of those,
//! from a seed that is printed. Knows nothing of coverage; a machine without sanitizers can run it.
//!
//! `plain SECONDS [SEED]` runs all targets for so long in all; `plain TARGET FILE...` runs single inputs again;
//! `plain --seeds DIRECTORY` writes the seeds there, for libFuzzer.

use spillway_fuzz::{TARGETS, Target, seeds};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Most bytes of an input that changes make longer.
const MOST_BYTES: usize = 16 << 10;

/// What is being tried, for the message when it fails; a target's own threads can fail too.
static TRYING: Mutex<(&str, Vec<u8>)> = Mutex::new(("", Vec::new()));

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: plain SECONDS [SEED] | plain TARGET FILE... | plain --seeds DIRECTORY";
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--seeds", directory] => write_seeds(Path::new(directory)),
        [seconds] if seconds.parse::<u64>().is_ok() => {
            let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
            run_all(seconds.parse().expect("just parsed"), clock)
        }
        [seconds, seed] if seconds.parse::<u64>().is_ok() && seed.parse::<u64>().is_ok() => {
            run_all(seconds.parse().expect("just parsed"), seed.parse().expect("just parsed"))
        }
        [target, ref files @ ..] if !files.is_empty() => again(target, files),
        _ => Err(usage.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("plain: {why}");
            ExitCode::FAILURE
        }
    }
}

fn write_seeds(directory: &Path) -> Result<(), String> {
    for (name, _) in TARGETS {
        let folder = directory.join(name);
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        for (n, seed) in seeds(name).iter().enumerate() {
            let file = folder.join(format!("seed-{n}"));
            std::fs::write(&file, seed).map_err(|e| format!("{}: {e}", file.display()))?;
        }
    }
    Ok(())
}

fn again(name: &str, files: &[&str]) -> Result<(), String> {
    let (_, body) = TARGETS
        .into_iter()
        .find(|(target, _)| *target == name)
        .ok_or(format!("there is no target {name}"))?;
    for file in files {
        body(&std::fs::read(file).map_err(|e| format!("{file}: {e}"))?);
        println!("{name}: {file}: passed");
    }
    Ok(())
}

fn run_all(seconds: u64, seed: u64) -> Result<(), String> {
    // A panic anywhere, in a thread of the product too, is the end: the input is kept.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        if let Ok(trying) = TRYING.lock() {
            let file = PathBuf::from(format!("artifacts/{}/plain-{seed}", trying.0));
            let _kept = std::fs::create_dir_all(file.parent().expect("it has one"))
                .and_then(|()| std::fs::write(&file, &trying.1));
            eprintln!("plain: {} FAILED: the input is in {} (seed {seed})", trying.0, file.display());
        }
        std::process::abort();
    }));
    println!("plain: {seconds} s in all, seed {seed}");
    let share = Duration::from_secs(seconds) / TARGETS.len() as u32;
    for target in TARGETS {
        let tried = run(target, share, seed)?;
        println!("plain: {}: {tried} inputs", target.0);
    }
    Ok(())
}

fn run((name, body): Target, share: Duration, seed: u64) -> Result<u64, String> {
    let mut corpus = seeds(name);
    if let Ok(failed_once) = std::fs::read_dir(format!("regressions/{name}")) {
        for file in failed_once {
            let file = file.map_err(|e| e.to_string())?.path();
            corpus.push(std::fs::read(&file).map_err(|e| format!("{}: {e}", file.display()))?);
        }
    }
    let mut tried = 0;
    let mut attempt = |input: &[u8]| {
        *TRYING.lock().expect("a panic ends the process") = (name, input.to_vec());
        body(input);
        tried += 1;
    };
    corpus.iter().for_each(|input| attempt(input));
    let mut state = seed | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    };
    let end = Instant::now() + share;
    while Instant::now() < end {
        let mut input = corpus[random(corpus.len())].clone();
        for _ in 0..1 + random(6) {
            change(&mut input, &corpus, &mut random);
        }
        attempt(&input);
    }
    Ok(tried)
}

/// Changes an input a little.
fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut impl FnMut(usize) -> usize) {
    let at = random(input.len());
    match random(7) {
        0 if !input.is_empty() => input[at] ^= 1 << random(8),
        1 if !input.is_empty() => input[at] = random(256) as u8,
        2 if !input.is_empty() => input[at] = [0, 1, 0x7f, 0x80, 0xff][random(5)],
        3 => input.truncate(at),
        4 => {
            let end = (at + 1 + random(32)).min(input.len());
            input.drain(at.min(end)..end);
        }
        5 => {
            let other = &corpus[random(corpus.len())];
            let from = random(other.len());
            let piece = other[from..(from + 1 + random(64)).min(other.len())].to_vec();
            input.splice(at..at, piece);
        }
        _ => {
            let bytes: Vec<u8> = (0..1 + random(16)).map(|_| random(256) as u8).collect();
            input.splice(at..at, bytes);
        }
    }
    input.truncate(MOST_BYTES);
}
