//! `spillway trace import`: a trace of what another program has recorded.

use super::{Format, Out, Source};
use crate::error::Failure;
use crate::output;
use spillway_advisor::trace::TraceWriter;
use std::path::PathBuf;

/// Options of `trace import`.
#[derive(Debug, clap::Args)]
pub struct Import {
    /// File of the other program; - for standard input. Unpacked if the name ends in .gz, .tar, .tar.gz or .tgz (an archive has
    /// one file)
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    format: Format,
    #[command(flatten)]
    out: Out,
}

/// Imports.
pub fn import(args: &Import) -> Result<(), Failure> {
    if args.format.format.is_none() {
        return Err(Failure::usage("--format FORMAT: which program has written it is never guessed"));
    }
    let mut source = Source::open(&args.file, &args.format)?;
    // Before there is a file: the first event says whether this is one, and when it began.
    let mut next = source.next()?;
    let mut writer = TraceWriter::new(args.out.create()?, &source.head()).map_err(|e| args.out.failed(&e))?;
    let copied: Result<u64, Failure> = (|| {
        let mut requests: u64 = 0;
        while let Some(event) = next.take() {
            writer.push(&event).map_err(|e| args.out.failed(&e))?;
            requests += 1;
            next = source.next()?;
        }
        writer.finish().map_err(|e| args.out.failed(&e))?;
        Ok(requests)
    })();
    let requests = copied.inspect_err(|_| args.out.remove())?;
    source.tell_end();
    output::complain("notice", &format!("{requests} requests are in {}", args.out.out.display()));
    Ok(())
}
