//! Translates qemu-img's messages about unreadable files into plain words for the user who named the file.
//!
//! Invariant: the message is one line of printable characters, and contains nothing internal: qemu-img knows a file by
//! the number of a descriptor, which it would advise to repair.

/// Longest part of its message that is passed on.
const MOST_CHARS: usize = 300;

/// Parts of known messages, with their meaning and remedy. The first match counts.
const KNOWN: &[(&str, &str)] = &[
    (
        "log that needs to be replayed",
        "it was not closed cleanly, and its log has writes that are not in the disk yet: start and stop its machine where it was \
         made, or run 'qemu-img check -f vhdx -r all' on a copy, and import that",
    ),
    (
        "Unsupported qcow2 feature",
        "it has features that this qemu-img does not know: make it again with 'qemu-img convert -O qcow2' where it was made",
    ),
    ("Input/output error", "it is cut off or damaged: copy or make it again"),
    (
        "Cannot allocate memory",
        "its tables take more memory than an import may have: make it again with 'qemu-img convert', with larger clusters",
    ),
    (
        "Operation not supported",
        "it is of a kind that qemu-img does not read, such as a differencing disk: merge it with its parent first",
    ),
    (
        "No such file or directory",
        "it names another file, which is not opened: make one file of them with 'qemu-img convert', and import that",
    ),
    (
        "Permission denied",
        "it names another file, which is not opened: make one file of them with 'qemu-img convert', and import that",
    ),
];

/// Translates a message about the file that qemu-img knows by this name.
pub fn in_plain_words(complaint: &str, name: &str) -> String {
    let line = complaint.lines().find_map(|line| line.strip_prefix("qemu-img: "));
    let line = line.or_else(|| complaint.lines().find(|line| !line.trim().is_empty())).unwrap_or_default();
    // "Could not open" refers to the file itself, under any name.
    let line = match line.strip_prefix("Could not open '").and_then(|rest| rest.split_once("': ")) {
        Some((_, why)) => why,
        None => line,
    };
    let line = line.replace(&format!(" '{name}'"), "").replace(name, "the file");
    let known = KNOWN.iter().find(|(words, _)| line.contains(words)).map(|(_, advice)| *advice);
    let plain: String = line.chars().take(MOST_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    // The message names a descriptor of ours, or a path beside it.
    let plain = match plain.contains("/proc/") {
        true => "qemu-img cannot read it".to_owned(),
        false => plain.trim().trim_end_matches('.').to_owned(),
    };
    match known {
        Some(advice) => format!("{advice} (qemu-img: {plain})"),
        None if plain.is_empty() => "qemu-img cannot read it: is it of that format, and whole?".to_owned(),
        None => format!("{plain}: is it of that format, and whole?"),
    }
}

#[cfg(test)]
mod tests {
    use super::in_plain_words;

    const NAME: &str = "/proc/self/fd/16";

    #[test]
    fn a_complaint_is_one_line_that_names_no_descriptor() {
        for (complaint, expected) in [
            (
                "qemu-img: Could not open '/proc/self/fd/16': VHDX image file '/proc/self/fd/16' opened read-only, but \
                 contains a log that needs to be replayed\nTo replay the log, run:\nqemu-img check -r all '/proc/self/fd/16'",
                "start and stop its machine",
            ),
            (
                "qemu-img: Could not open '/proc/self/fd/16': Image is not in qcow2 format",
                "Image is not in qcow2 format: is it",
            ),
            (
                "qemu-img: Could not open 'json:{\"driver\": \"qcow2\", \"file\": {\"filename\": \"/proc/self/fd/16\"}}': L1 table is too small",
                "L1 table is too small",
            ),
            (
                "block-vpc: a warning\nqemu-img: error while reading at byte 65536: Input/output error",
                "cut off or damaged",
            ),
            (
                "qemu-img: Could not open '/proc/self/fd/16': Could not open '/proc/self/fd/disk-s001.vmdk': No such file or directory",
                "it names another file",
            ),
            ("qemu-img: \u{1b}[2Jx '/proc/self/fd/16' and /proc/self/fd/16", "[2Jx and the file"),
            ("", "qemu-img cannot read it"),
            ("\n\n", "qemu-img cannot read it"),
        ] {
            let words = in_plain_words(complaint, NAME);
            assert!(words.contains(expected), "{complaint}: {words}");
            assert!(!words.contains("/proc") && !words.contains(char::is_control), "{words}");
        }
        assert!(in_plain_words(&"x".repeat(5000), NAME).len() < 500);
    }
}
