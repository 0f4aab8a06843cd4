//! Rules that a compiler does not know (`cargo run -p xtask walls`, `house`, `licences`), and what mdBook builds from (`book`).
//!
//! Owns the checks and lists every breach, not only the first; changes nothing but the folder of a book.

mod book;
mod house;
mod licences;
mod programs;
mod rooms;
mod texts;
mod walls;
mod words;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo run -p xtask -- walls|house|licences|book PROGRAMS OUT|links FOLDER
  walls               imports between crates
  house               habits of files, owners, texts, test programs, links between pages
  licences            licences and sources of dependencies
  book PROGRAMS OUT   put together what mdBook builds from, with the help of the programs in the folder PROGRAMS
  links FOLDER        links of a finished book";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(breaches) if breaches.is_empty() => ExitCode::SUCCESS,
        Ok(breaches) => {
            for breach in &breaches {
                eprintln!("{breach}");
            }
            eprintln!("{} breaches", breaches.len());
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &[&str]) -> Result<Vec<String>> {
    match arguments {
        ["walls"] => Ok(walls::breaches(&metadata()?)),
        ["licences"] => Ok(licences::breaches(&metadata()?)),
        ["house"] => house(&root()?, &files()?),
        ["book", programs, out] => {
            let files = files()?;
            let files: Vec<&str> = files.lines().collect();
            book::assemble(&root()?, &files, programs.as_ref(), out.as_ref())?;
            Ok(Vec::new())
        }
        ["links", folder] => book::html_breaches(folder.as_ref()),
        _ => bail!(USAGE),
    }
}

fn house(root: &Path, files: &str) -> Result<Vec<String>> {
    let code = || files.lines().filter(|file| file.ends_with(".rs"));
    let mut found = house::breaches(root, code())?;
    found.extend(rooms::breaches(root, code())?);
    let script = std::fs::read_to_string(root.join("scripts/test")).context("scripts/test")?;
    found.extend(programs::breaches(root, code(), &metadata()?, &script));
    let text =
        std::fs::read_to_string(root.join("docs/api/openapi.json")).context("docs/api/openapi.json")?;
    found.extend(texts::breaches(&serde_json::from_str(&text).context("docs/api/openapi.json")?));
    found.extend(words::breaches(root, files.lines())?);
    found.extend(book::breaches(root, &files.lines().collect::<Vec<_>>())?);
    Ok(found)
}

fn root() -> Result<PathBuf> {
    Ok(output("git", &["rev-parse", "--show-toplevel"])?.trim().into())
}

/// What git knows and people have written, a line each, named from the root on.
fn files() -> Result<String> {
    // Names that others have given, and what a program has written from the sources.
    let written = [":(exclude,top)console/package-lock.json", ":(exclude,top)console/dist"];
    output("git", &[&["ls-files", "--full-name", ":/"][..], &written].concat())
}

fn metadata<T: serde::de::DeserializeOwned>() -> Result<T> {
    // What is built for other systems is not part of the programs.
    let linux = "--filter-platform=x86_64-unknown-linux-gnu";
    let text = output("cargo", &["metadata", "--format-version=1", "--locked", linux])?;
    serde_json::from_str(&text).context("cargo metadata")
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(arguments).output().with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).with_context(|| format!("{program} printed no UTF-8"))
}
