//! Sections of man pages: what a help text has behind the options becomes the sections that man-pages(7) names.
//!
//! Invariant: no line of the text is lost.

/// How a paragraph of a help text begins, and the section that it becomes.
const SECTIONS: [(&str, &str); 7] = [
    ("Examples:", "EXAMPLES"),
    ("Example:", "EXAMPLES"),
    ("Exit codes:", "EXIT STATUS"),
    ("Exit code:", "EXIT STATUS"),
    ("Files:", "FILES"),
    ("Modes:", "MODES"),
    ("See also:", "SEE ALSO"),
];
/// The section of a paragraph that begins otherwise.
const OTHER: &str = "NOTES";

/// Divides the section `EXTRA` of a page, as clap_mangen writes it.
pub fn with_sections(page: &str) -> String {
    let Some((before, extra)) = page.split_once(".SH EXTRA\n") else { return page.to_owned() };
    let (extra, after) = extra.find(".SH ").map_or((extra, ""), |at| extra.split_at(at));
    let mut text = before.to_owned();
    let mut current = "";
    for paragraph in extra.trim_end().split("\n\n") {
        let named = SECTIONS.iter().find_map(|(word, name)| Some((*name, paragraph.strip_prefix(word)?)));
        let (name, content) = named.unwrap_or((OTHER, paragraph));
        text += &if name == current { "\n".to_owned() } else { format!(".SH {name}\n") };
        text += content.strip_prefix('\n').unwrap_or(content.trim_start());
        text.push('\n');
        current = name;
    }
    text + after
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_usual_sections() {
        let page = ".SH NAME\nx\n.SH EXTRA\nFirst.\n\nMore.\n\nExamples:\n  x \\-y\n\nExit code: 1 if not.\n.SH VERSION\nv1\n";
        let divided = ".SH NAME\nx\n.SH NOTES\nFirst.\n\nMore.\n.SH EXAMPLES\n  x \\-y\n.SH EXIT STATUS\n1 if not.\n.SH VERSION\nv1\n";
        assert_eq!(with_sections(page), divided);
        assert_eq!(with_sections(".SH NAME\nx\n"), ".SH NAME\nx\n");
    }
}
