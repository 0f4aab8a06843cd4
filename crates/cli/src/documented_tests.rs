//! What `README.md` and `docs/` show of `spillway` is taken by it: each command in a block of code as it stands, and each one
//! in a sentence as far as it goes.
//!
//! Invariant: nothing is executed.

use crate::args::Cli;
use clap::Parser;
use clap::error::ErrorKind;
use pulldown_cmark::{Event, Parser as Markdown, Tag, TagEnd};
use std::path::{Path, PathBuf};

/// A command that a page shows.
struct Shown {
    words: Vec<String>,
    /// It is in a sentence, where it may be a name of a command alone, and has words for values.
    in_text: bool,
}

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|e| e == "md") {
            found.push(path);
        }
    }
}

/// All commands of a page.
fn shown(page: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    let mut block: Option<String> = None;
    for event in Markdown::new_ext(page, pulldown_cmark::Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::CodeBlock(_)) => block = Some(String::new()),
            Event::End(TagEnd::CodeBlock) => {
                let text = block.take().unwrap_or_default().replace("\\\n", " ");
                found.extend(text.lines().flat_map(commands).map(|words| Shown { words, in_text: false }));
            }
            Event::Text(text) => {
                if let Some(block) = &mut block {
                    block.push_str(&text);
                }
            }
            Event::Code(text) => {
                // A name of a table's cell may have a mark before a bar.
                let text = text.replace("\\|", "|");
                found.extend(commands(&text).into_iter().map(|words| Shown { words, in_text: true }));
            }
            _ => {}
        }
    }
    found
}

/// The words of each `spillway` of a line of shell.
fn commands(line: &str) -> Vec<Vec<String>> {
    let begins = |at: usize| line[..at].chars().next_back().is_none_or(|c| " ('".contains(c));
    // The type of a storage of Proxmox VE is no command either.
    let is_type = |at: usize| line[..at].ends_with("pvesm add ");
    let starts = line.match_indices("spillway ").filter(|(at, _)| begins(*at) && !is_type(*at));
    let all = starts.map(|(at, _)| words(&line[at..], line[..at].ends_with('\'')));
    // The package's name is no command.
    all.filter(|words| words.len() > 1).collect()
}

/// Splits a shell line into the words of its first command. A variable stays as it is written.
fn words(text: &str, in_quotes: bool) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut begun, mut quote) = (String::new(), false, None);
    for c in text.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'') if in_quotes => break,
            (None | Some('"'), '$') => {}
            (None, '\'' | '"') => (quote, begun) = (Some(c), true),
            (None, '|' | ';' | '&' | '>' | '<' | ')') => break,
            (None, '#') if word.is_empty() => break,
            (None, ' ') => {
                if begun || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            (_, c) => word.push(c),
        }
    }
    if begun || !word.is_empty() {
        words.push(word);
    }
    words
}

/// Why the program does not take it.
fn complaint(shown: &Shown) -> Option<String> {
    // A text has dots where something is left out.
    if shown.words.iter().any(|word| word.ends_with("...")) {
        return None;
    }
    let error = Cli::try_parse_from(&shown.words).err()?;
    let passes = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::InvalidValue
        | ErrorKind::ValueValidation => shown.in_text,
        _ => false,
    };
    (!passes).then(|| {
        format!("{}: {}", shown.words.join(" "), error.to_string().lines().next().unwrap_or_default())
    })
}

#[test]
fn commands_that_the_pages_show_are_taken() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("README.md")];
    pages(&root.join("docs"), &mut files);
    let mut found = Vec::new();
    let mut count = 0;
    for file in &files {
        let page = std::fs::read_to_string(file).unwrap();
        for shown in shown(&page) {
            count += 1;
            found.extend(complaint(&shown).map(|why| format!("{}: {why}", file.display())));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(count > 150, "commands are found: {count}");
}

#[test]
fn a_command_that_does_not_exist_is_found() {
    let complaints = |page: &str| shown(page).iter().filter_map(complaint).count();
    assert_eq!(complaints("    spillway machine list | sort\n    x=$(spillway machine claim a --wait)\n"), 0);
    assert_eq!(complaints("    spillway machine lst\n    cd && spillway top --nothing\n"), 2);
    assert_eq!(complaints("    spillway machine claim\n"), 1);
    assert_eq!(complaints("The command `spillway machine claim` does, `spillway machine lst` does not."), 1);
}
