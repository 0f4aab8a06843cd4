//! The page: its skeleton, its tables, its words.
//!
//! Invariants: nothing is fetched from anywhere; no word of a file is markup.

use super::figures::Spread;
use super::numbers::number;
use super::svg::style;
use crate::markup::{escaped, plain};

const CSS: &str = include_str!("page.css");

/// A page under construction, with the headings that its table of contents lists.
#[derive(Default)]
pub struct Page {
    body: String,
    contents: Vec<(u8, String, String)>,
}

impl Page {
    /// Adds markup.
    pub fn put(&mut self, markup: &str) {
        self.body.push_str(markup);
        self.body.push('\n');
    }

    /// Adds a paragraph of words.
    pub fn say(&mut self, class: &str, words: &str) {
        self.put(&format!("<p class=\"{class}\">{}</p>", safe(words)));
    }

    /// Begins a chapter.
    pub fn chapter(&mut self, id: &str, title: &str) {
        self.put(&format!("<h2 id=\"{id}\">{}</h2>", safe(title)));
        self.contents.push((2, id.into(), title.into()));
    }

    /// Begins a part of a chapter.
    pub fn part(&mut self, id: &str, title: &str) {
        self.put(&format!("<h3 id=\"{id}\">{}</h3>", safe(title)));
        self.contents.push((3, id.into(), title.into()));
    }

    /// Adds what can be opened.
    pub fn folded(&mut self, title: &str, text: &str) {
        self.put(&format!(
            "<details><summary>{}</summary><pre>{}</pre></details>",
            safe(title),
            escaped(&text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', " "))
        ));
    }

    /// The whole document.
    pub fn html(&self, title: &str, head: &str) -> String {
        let mut contents = String::new();
        let mut inside = false;
        for (level, id, words) in &self.contents {
            let link = format!("<a href=\"#{id}\">{}</a>", safe(words));
            match (level, inside) {
                (2, true) => contents.push_str(&format!("</ul></li>\n<li>{link}<ul>")),
                (2, false) => contents.push_str(&format!("<li>{link}<ul>")),
                _ => contents.push_str(&format!("<li>{link}</li>")),
            }
            inside = true;
        }
        if inside {
            contents.push_str("</ul></li>");
        }
        let contents = contents.replace("<ul></ul>", "");
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <title>{}</title>\n<style>\n{}{CSS}</style>\n</head>\n<body>\n<header>\n{head}</header>\n\
             <nav aria-label=\"Contents\"><h2>Contents</h2><ul>\n{contents}\n</ul></nav>\n<main>\n{}</main>\n\
             <footer><p>Made by spillway-lab {}. The figures are in <code>report/</code> beside this page, as CSV and \
             JSON; what was sampled is in <code>runs/</code>.</p></footer>\n</body>\n</html>\n",
            safe(title),
            style(),
            self.body,
            env!("CARGO_PKG_VERSION"),
        )
    }
}

/// Words of a file, for a page.
pub fn safe(words: &str) -> String {
    escaped(&plain(words))
}

/// A table; its cells are markup.
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    class: &'static str,
}

impl Table {
    /// With the words of its first row. The first column is words, too.
    pub fn new<S: AsRef<str>>(class: &'static str, head: impl IntoIterator<Item = S>) -> Table {
        let head = head.into_iter().map(|words| safe(words.as_ref())).collect();
        Table { head, rows: Vec::new(), class }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// As markup; wide ones are moved within their own box.
    pub fn html(&self) -> String {
        let mut out =
            format!("<div class=\"scroll\" tabindex=\"0\"><table class=\"{}\"><thead><tr>", self.class);
        for words in &self.head {
            out.push_str(&format!("<th scope=\"col\">{words}</th>"));
        }
        out.push_str("</tr></thead><tbody>\n");
        for row in &self.rows {
            out.push_str("<tr>");
            for (i, cell) in row.iter().enumerate() {
                match i {
                    0 => out.push_str(&format!("<th scope=\"row\">{cell}</th>")),
                    _ => out.push_str(&format!("<td>{cell}</td>")),
                }
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody></table></div>");
        out
    }
}

/// A figure with its spread, as markup.
pub fn figure(spread: Option<&Spread>) -> String {
    figure_of(spread, "")
}

/// The same, with markup between the figure and its spread.
pub fn figure_of(spread: Option<&Spread>, between: &str) -> String {
    let Some(spread) = spread else { return "<span class=\"none\">-</span>".into() };
    let (low, high) = (number(spread.low), number(spread.high));
    let range = if spread.runs > 1 && low != high {
        format!(" <small>{low} to {high}</small>")
    } else {
        String::new()
    };
    format!("{}{between}{range}", number(spread.mean))
}

/// A scenario's name, with the colour that it has in all pictures.
pub fn scenario(place: usize, name: &str) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 12 12\" aria-hidden=\"true\"><rect width=\"12\" height=\"12\" rx=\"3\" \
         class=\"f-s{}\"/></svg>{}",
        place % 7,
        safe(name)
    )
}
