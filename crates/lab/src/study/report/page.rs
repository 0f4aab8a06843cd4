//! The page: its chapters, tables and pictures as values, which a template turns into HTML.
//!
//! Invariants: nothing is fetched from anywhere; all text of files is escaped by the template, since no value but a drawn picture and the
//! style sheet is markup.

use super::figures::Spread;
use super::results::Results;
use crate::markup::plain;
use crate::numbers::number;
use crate::picture::{Picture, style};
use crate::template;
use anyhow::Result;
use serde::Serialize;

/// A page under construction.
#[derive(Default)]
pub struct Page<'a> {
    blocks: Vec<Block<'a>>,
    contents: Vec<Heading>,
}

/// A chapter in the table of contents, or a part of one.
#[derive(Serialize)]
struct Heading {
    id: String,
    title: String,
    parts: Vec<Heading>,
}

/// What stands under another on the page.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Block<'a> {
    Chapter {
        id: String,
        title: String,
    },
    Part {
        id: String,
        title: String,
    },
    Paragraph {
        class: &'static str,
        text: String,
    },
    Facts {
        facts: Vec<(String, String)>,
    },
    Table(Table),
    Pair {
        pictures: [(&'a Picture, String); 2],
    },
    Pictures {
        pictures: &'a [Picture],
    },
    Folded {
        title: String,
        text: String,
    },
    /// What is not torn apart when the page is printed.
    Together {
        blocks: Vec<Block<'a>>,
    },
}

impl<'a> Page<'a> {
    /// Adds a paragraph.
    pub fn say(&mut self, class: &'static str, text: &str) {
        self.blocks.push(Block::Paragraph { class, text: plain(text) });
    }

    /// Begins a chapter.
    pub fn chapter(&mut self, id: &str, title: &str) {
        let (id, title) = (plain(id), plain(title));
        self.contents.push(Heading { id: id.clone(), title: title.clone(), parts: Vec::new() });
        self.blocks.push(Block::Chapter { id, title });
    }

    /// Begins a part of a chapter.
    pub fn part(&mut self, id: &str, title: &str) {
        let (id, title) = (plain(id), plain(title));
        if let Some(chapter) = self.contents.last_mut() {
            chapter.parts.push(Heading { id: id.clone(), title: title.clone(), parts: Vec::new() });
        }
        self.blocks.push(Block::Part { id, title });
    }

    /// Adds names and what each is.
    pub fn facts(&mut self, facts: impl IntoIterator<Item = (String, String)>) {
        let facts: Vec<_> = facts.into_iter().map(|(name, value)| (plain(&name), plain(&value))).collect();
        match facts.is_empty() {
            true => self.say("note", "Nothing was recorded."),
            false => self.blocks.push(Block::Facts { facts }),
        }
    }

    /// Adds a table.
    pub fn table(&mut self, table: Table) {
        self.blocks.push(Block::Table(table));
    }

    /// Adds two pictures side by side, each over its caption.
    pub fn pair(&mut self, left: (&'a Picture, String), right: (&'a Picture, String)) {
        self.blocks.push(Block::Pair { pictures: [left, right] });
    }

    /// Adds small pictures side by side, each under its label.
    pub fn pictures(&mut self, pictures: &'a [Picture]) {
        self.blocks.push(Block::Pictures { pictures });
    }

    /// Adds text that a reader can unfold. It keeps its lines.
    pub fn folded(&mut self, title: &str, text: &str) {
        let text = text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', " ");
        self.blocks.push(Block::Folded { title: plain(title), text });
    }

    /// Keeps together what `add` adds.
    pub fn together(&mut self, add: impl FnOnce(&mut Page<'a>)) {
        let before = std::mem::take(&mut self.blocks);
        add(self);
        let blocks = std::mem::replace(&mut self.blocks, before);
        self.blocks.push(Block::Together { blocks });
    }

    /// The whole document.
    pub fn html(&self, title: &str, subtitle: &[Cell]) -> Result<String> {
        #[derive(Serialize)]
        struct Values<'a> {
            title: String,
            subtitle: &'a [Cell],
            colours: String,
            css: &'static str,
            version: &'static str,
            contents: &'a [Heading],
            blocks: &'a [Block<'a>],
        }
        let values = Values {
            title: plain(title),
            subtitle,
            colours: style(),
            css: include_str!("templates/page.css"),
            version: env!("CARGO_PKG_VERSION"),
            contents: &self.contents,
            blocks: &self.blocks,
        };
        template::render("page.html", include_str!("templates/page.html"), &values)
    }
}

/// A table.
#[derive(Serialize)]
pub struct Table {
    class: &'static str,
    head: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with the text of its first row.
    pub fn new<S: AsRef<str>>(class: &'static str, head: impl IntoIterator<Item = S>) -> Table {
        Table { class, head: head.into_iter().map(|text| plain(text.as_ref())).collect(), rows: Vec::new() }
    }

    /// A table with a column for each scenario, behind one of this name.
    pub fn by_scenario(class: &'static str, first: &str, results: &Results) -> Table {
        let names = results.scenarios.iter().map(|scenario| scenario.name.as_str());
        Table::new(class, std::iter::once(first).chain(names))
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }
}

/// The content of a cell: pieces of text.
#[derive(Clone, Default, Serialize)]
pub struct Cell(Vec<Piece>);

/// Text in one style.
#[derive(Clone, Serialize)]
struct Piece {
    style: Style,
    text: String,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Style {
    Normal,
    Small,
    Bold,
    Code,
    SmallCode,
    /// A value that is not there.
    None,
    /// A mark in the colour of the series whose number is the text.
    Key,
}

impl Cell {
    /// A cell of plain text.
    pub fn text(text: impl AsRef<str>) -> Cell {
        Cell::default().and(Style::Normal, text.as_ref())
    }

    /// A name as it stands in files.
    pub fn code(text: &str) -> Cell {
        Cell::default().and(Style::Code, text)
    }

    /// What is said where a value is missing.
    pub fn none(text: &str) -> Cell {
        Cell::default().and(Style::None, text)
    }

    /// A scenario's name, with the colour that it has in all pictures.
    pub fn scenario(place: usize, name: &str) -> Cell {
        Cell::default().and(Style::Key, &(place % 7).to_string()).and_text(name)
    }

    /// A figure with its spread.
    pub fn figure(spread: Option<&Spread>) -> Cell {
        Cell::figure_and_ratio(spread, "")
    }

    /// A figure, a ratio, and the figure's spread.
    pub fn figure_and_ratio(spread: Option<&Spread>, ratio: &str) -> Cell {
        let Some(spread) = spread else { return Cell::none("-") };
        let (low, high) = (number(spread.low), number(spread.high));
        let range = if spread.runs > 1 && low != high { format!("{low} to {high}") } else { String::new() };
        Cell::text(number(spread.mean)).and_bold(ratio).and_small(&range)
    }

    /// With more text. None of these adds anything where the text is empty.
    pub fn and_text(self, text: &str) -> Cell {
        self.and(Style::Normal, text)
    }

    /// With bold text.
    pub fn and_bold(self, text: &str) -> Cell {
        self.and(Style::Bold, text)
    }

    /// With small text.
    pub fn and_small(self, text: &str) -> Cell {
        self.and(Style::Small, text)
    }

    /// With a name as it stands in files, in small text.
    pub fn and_small_code(self, text: &str) -> Cell {
        self.and(Style::SmallCode, text)
    }

    fn and(mut self, style: Style, text: &str) -> Cell {
        if !text.is_empty() {
            self.0.push(Piece { style, text: plain(text) });
        }
        self
    }
}
