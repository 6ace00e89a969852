//! What the user says: edited lines with a history at a terminal, plain lines otherwise.

use anyhow::Result;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Lines that the history keeps.
const HISTORY_MAX: usize = 1000;

/// The source of what is said.
pub(super) enum ChatInput {
    Edited(Box<LineEditor>),
    Plain,
}

/// A line editor, and the file with its history; none if this user has no directory for it.
pub(super) struct LineEditor {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl ChatInput {
    /// Reads standard input, by a line editor if both ends are a terminal.
    pub(super) fn open(is_terminal: bool) -> Result<Self> {
        if !is_terminal || !std::io::stdout().is_terminal() {
            return Ok(ChatInput::Plain);
        }
        let config = Config::builder().bracketed_paste(true).max_history_size(HISTORY_MAX)?.build();
        let mut editor = DefaultEditor::with_config(config)?;
        let history = history();
        if let Some(file) = &history {
            // a missing or unreadable history is an empty one
            let _ = editor.load_history(file);
        }
        Ok(ChatInput::Edited(Box::new(LineEditor { editor, history })))
    }

    /// The next message, without white space around it; none at the end of input.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let said = match self {
            ChatInput::Edited(editor) => editor.next()?,
            ChatInput::Plain => {
                let mut line = String::new();
                (std::io::stdin().read_line(&mut line)? > 0).then_some(line)
            }
        };
        Ok(said.map(|said| said.trim().to_owned()))
    }
}

impl LineEditor {
    fn next(&mut self) -> Result<Option<String>> {
        loop {
            match self.editor.readline("> ") {
                Ok(said) => {
                    self.keep(&said);
                    return Ok(Some(said));
                }
                Err(ReadlineError::Interrupted) => eprintln!("/bye or Ctrl-D ends"),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Adds a message to the history, as far as its file can be written.
    fn keep(&mut self, said: &str) {
        if said.trim().is_empty() || self.editor.add_history_entry(said).is_err() {
            return;
        }
        if let Some(file) = &self.history {
            let _ = file.parent().map(std::fs::create_dir_all);
            let _ = self.editor.save_history(file);
        }
    }
}

/// The file with the history, in the user's directory for state.
fn history() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state =
        state.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    Some(state?.join("mixfleet/chat-history"))
}
