//! Rewrites a template, so that minijinja renders it as jinja2 does.
//!
//! Operators whose results differ become calls of the functions of [`operators`](super::operators): `a % b`
//! becomes `__mod__(a, b)`. Line ends become `\n`, texts in tags lose the escapes that only Python has, and
//! `generation` blocks, which mark the assistant's text for training, become `if true`. Unparsable tags stay
//! unchanged: minijinja then reports the fault.

use super::lexer::{Lexeme, LexemeKind, tag};
use std::fmt::Write;

/// Nesting of expressions beyond which a tag stays unchanged.
const DEPTH_MAX: usize = 60;
/// Methods of Python's dictionaries; as attributes they take precedence over keys.
const METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// A tag that cannot be parsed.
struct Unread;

type Translation = Result<String, Unread>;

/// Returns the template in minijinja's syntax.
pub(in crate::model) fn translate(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut written = String::with_capacity(source.len() + source.len() / 4);
    let mut rest = source.as_str();
    while let Some(start) = ["{{", "{%", "{#"].iter().filter_map(|open| rest.find(open)).min() {
        written.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = if rest.starts_with("{#") {
            let length = rest.find("#}").map_or(rest.len(), |end| end + 2);
            written.push_str(&rest[..length]);
            length
        } else {
            copy_tag(rest, &mut written)
        };
        rest = &rest[length..];
    }
    written.push_str(rest);
    written
}

/// Copies the tag at the beginning of `text`, and all of a raw block; returns the number of bytes.
fn copy_tag(text: &str, written: &mut String) -> usize {
    let Some(found) = tag(text) else {
        written.push_str(text);
        return text.len();
    };
    let is_block = text.starts_with("{%");
    if is_block && found.lexemes.first().is_some_and(|first| first.is_name("raw")) {
        let length = end_of_raw(text, found.length);
        let (tag, rest) = text[..length].split_at(found.length);
        // minijinja removes the line end behind the tag, and jinja2 does not
        written.extend([tag, if found.close_sign == 0 && rest.starts_with('\n') { "\n" } else { "" }, rest]);
        return length;
    }
    let mut tokens = LexemeCursor { lexemes: &found.lexemes, at: 0, depth: 0 };
    let inside = match is_block {
        true => tokens.statement(),
        false => tokens.tuple().and_then(|value| tokens.end().map(|()| value)),
    };
    let original = &text[..found.length];
    match inside {
        Err(Unread) => written.push_str(original),
        Ok(inside) => {
            // Errors must name the template's own lines.
            let lines = original.matches('\n').count();
            let breaks = "\n".repeat(lines.saturating_sub(inside.matches('\n').count()));
            let (open, close) =
                (&text[..2 + found.open_sign], &original[found.length - 2 - found.close_sign..]);
            written.extend([open, " ", &inside, " ", &breaks, close]);
        }
    }
    found.length
}

fn end_of_raw(text: &str, start: usize) -> usize {
    let mut at = start;
    while let Some(next) = text[at..].find("{%") {
        at += next;
        match tag(&text[at..]) {
            Some(found) if found.lexemes.first().is_some_and(|first| first.is_name("endraw")) => {
                return at + found.length;
            }
            _ => at += 2,
        }
    }
    text.len()
}

/// The lexemes of a tag, read from left to right.
struct LexemeCursor<'a> {
    lexemes: &'a [Lexeme<'a>],
    at: usize,
    depth: usize,
}

impl<'a> LexemeCursor<'a> {
    fn peek(&self) -> Option<&'a Lexeme<'a>> {
        self.lexemes.get(self.at)
    }

    fn next(&mut self) -> Result<&'a Lexeme<'a>, Unread> {
        let lexeme = self.peek().ok_or(Unread)?;
        self.at += 1;
        Ok(lexeme)
    }

    fn is(&self, sign: &str) -> bool {
        self.peek().is_some_and(|lexeme| lexeme.is_sign(sign))
    }

    fn is_name(&self, name: &str) -> bool {
        self.peek().is_some_and(|lexeme| lexeme.is_name(name))
    }

    fn skip(&mut self, sign: &str) -> bool {
        let found = self.is(sign);
        self.at += usize::from(found);
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, sign: &str) -> Result<(), Unread> {
        if self.skip(sign) { Ok(()) } else { Err(Unread) }
    }

    fn name(&mut self) -> Result<&'a str, Unread> {
        let lexeme = self.next()?;
        if lexeme.kind == LexemeKind::Name { Ok(lexeme.text) } else { Err(Unread) }
    }

    fn end(&self) -> Result<(), Unread> {
        if self.at == self.lexemes.len() { Ok(()) } else { Err(Unread) }
    }

    /// Copies lexemes up to one that `ends` at depth zero.
    fn copied(&mut self, ends: &dyn Fn(&Lexeme<'_>) -> bool) -> String {
        let (mut copied, mut depth) = (Vec::new(), 0usize);
        while let Some(lexeme) = self.peek() {
            if depth == 0 && ends(lexeme) {
                break;
            }
            match lexeme.text {
                "(" | "[" | "{" if lexeme.kind == LexemeKind::Sign => depth += 1,
                ")" | "]" | "}" if lexeme.kind == LexemeKind::Sign => depth = depth.saturating_sub(1),
                _ => {}
            }
            copied.push(lexeme.written());
            self.at += 1;
        }
        copied.join(" ").replace(" . ", ".")
    }

    fn statement(&mut self) -> Translation {
        let keyword = self.name()?;
        let written = match keyword {
            "generation" => "if true".into(),
            "endgeneration" => "endif".into(),
            "if" | "elif" | "print" | "do" | "autoescape" => format!("{keyword} {}", self.tuple()?),
            "for" => self.for_loop()?,
            "set" => self.assignment()?,
            "macro" => format!("macro {}{}", self.name()?, self.parameters()?),
            "call" => {
                let parameters = if self.is("(") { self.parameters()? } else { String::new() };
                let (parameters, set) =
                    parameters.split_at(parameters.find(" %}").unwrap_or(parameters.len()));
                format!("call{parameters} {}{set}", self.expression()?)
            }
            "filter" => {
                let first = self.filter_call()?;
                format!("filter {}", self.filters(first)?)
            }
            "with" => self.with()?,
            _ => format!("{keyword} {}", self.copied(&|_| false)),
        };
        self.end()?;
        Ok(written)
    }

    fn for_loop(&mut self) -> Translation {
        let targets = self.copied(&|lexeme| lexeme.is_name("in"));
        if !self.skip_name("in") {
            return Err(Unread);
        }
        let mut items = vec![self.or()?];
        let mut is_tuple = false;
        while self.skip(",") {
            is_tuple = true;
            if self.peek().is_none() || self.is_name("if") || self.is_name("recursive") {
                break;
            }
            items.push(self.or()?);
        }
        let mut written = match is_tuple {
            true => format!("for {targets} in ({},)", items.join(", ")),
            // minijinja takes none as an empty list
            false => format!("for {targets} in __iterable__({})", items.join("")),
        };
        if self.skip_name("if") {
            written.push_str(&format!(" if {}", self.expression()?));
        }
        if self.skip_name("recursive") {
            written.push_str(" recursive");
        }
        Ok(written)
    }

    fn assignment(&mut self) -> Translation {
        let target = self.copied(&|lexeme| lexeme.is_sign("=") || lexeme.is_sign("|"));
        if self.skip("=") {
            return Ok(format!("set {target} = {}", self.tuple()?));
        }
        match self.skip("|") {
            true => {
                let first = self.filter_call()?;
                Ok(format!("set {target} | {}", self.filters(first)?))
            }
            false => Ok(format!("set {target}")),
        }
    }

    fn with(&mut self) -> Translation {
        // no value sees the targets before it
        let (mut values, mut targets) = (Vec::new(), Vec::new());
        while self.peek().is_some() {
            let target = self.copied(&|lexeme| lexeme.is_sign("="));
            self.expect("=")?;
            targets.push(format!("{target} = __with{}__", values.len()));
            values.push(format!("__with{}__ = {}", values.len(), self.expression()?));
            if !self.skip(",") {
                break;
            }
        }
        values.append(&mut targets);
        Ok(format!("with {}", values.join(", ")))
    }

    /// The parameters of a macro or call block. Defaults that name earlier ones, which minijinja does not
    /// know there, are set in the body.
    fn parameters(&mut self) -> Translation {
        self.expect("(")?;
        let (mut parameters, mut names, mut set) = (Vec::new(), Vec::new(), String::new());
        while !self.skip(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            let name = self.name()?;
            let first = self.at;
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            let mut others =
                self.lexemes[first..self.at].iter().filter(|lexeme| lexeme.kind == LexemeKind::Name);
            let is_of_others = others.any(|lexeme| names.contains(&lexeme.text));
            names.push(name);
            parameters.push(match default {
                Some(default) if is_of_others => {
                    let _ = write!(
                        set,
                        " %}}{{% if {name} is undefined %}}{{% set {name} = {default} %}}{{% endif"
                    );
                    name.to_owned()
                }
                Some(default) => format!("{name}={default}"),
                None => name.to_owned(),
            });
        }
        Ok(format!("({}){set}", parameters.join(", ")))
    }

    /// An expression, or several with commas.
    fn tuple(&mut self) -> Translation {
        let first = self.expression()?;
        if self.is(",") { self.tuple_from(first) } else { Ok(first) }
    }

    fn tuple_from(&mut self, first: String) -> Translation {
        let mut items = vec![first];
        while self.skip(",") {
            if self.peek().is_none() || self.is(")") {
                break;
            }
            items.push(self.expression()?);
        }
        Ok(format!("({},)", items.join(", ")))
    }

    fn expression(&mut self) -> Translation {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Unread);
        }
        let mut written = self.or()?;
        while self.skip_name("if") {
            let test = self.or()?;
            written = match self.skip_name("else") {
                true => format!("{written} if {test} else {}", self.expression()?),
                false => format!("{written} if {test}"),
            };
        }
        self.depth -= 1;
        Ok(written)
    }

    fn or(&mut self) -> Translation {
        let mut written = self.and()?;
        while self.skip_name("or") {
            written = format!("{written} or {}", self.and()?);
        }
        Ok(written)
    }

    fn and(&mut self) -> Translation {
        let mut written = self.not()?;
        while self.skip_name("and") {
            written = format!("{written} and {}", self.not()?);
        }
        Ok(written)
    }

    fn not(&mut self) -> Translation {
        let mut nots = 0;
        while self.skip_name("not") {
            nots += 1;
        }
        Ok(format!("{}{}", "not ".repeat(nots), self.comparison()?))
    }

    fn comparison(&mut self) -> Translation {
        let first = self.sum()?;
        let mut parts: Vec<(&str, String)> = Vec::new();
        loop {
            let sign = ["==", "!=", "<=", ">=", "<", ">"].into_iter().find(|sign| self.is(sign));
            let is_not_in =
                self.is_name("not") && self.lexemes.get(self.at + 1).is_some_and(|next| next.is_name("in"));
            let operator = match sign {
                Some(sign) => sign,
                None if self.is_name("in") => "in",
                None if is_not_in => "not in",
                None => break,
            };
            self.at += 1 + usize::from(is_not_in);
            parts.push((operator, self.sum()?));
        }
        let orders = |(sign, _): &(&str, String)| sign.starts_with(['<', '>']);
        // minijinja orders values of different kinds
        if parts.iter().any(orders) && !parts.iter().any(|(sign, _)| sign.ends_with("in")) {
            let parts = parts.iter().map(|(sign, part)| format!(", '{sign}', {part}"));
            return Ok(format!("__compare__({first}{})", parts.collect::<String>()));
        }
        Ok(parts.iter().fold(first, |all, (sign, part)| format!("{all} {sign} {part}")))
    }

    fn sum(&mut self) -> Translation {
        let mut written = self.joined()?;
        loop {
            written = if self.skip("+") {
                format!("__add__({written}, {})", self.joined()?)
            } else if self.skip("-") {
                format!("{written} - {}", self.joined()?)
            } else {
                return Ok(written);
            };
        }
    }

    fn joined(&mut self) -> Translation {
        let mut parts = vec![self.product()?];
        while self.skip("~") {
            parts.push(self.product()?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { format!("__join__({})", parts.join(", ")) })
    }

    fn product(&mut self) -> Translation {
        let mut written = self.power()?;
        loop {
            written = if self.skip("*") {
                format!("__mul__({written}, {})", self.power()?)
            } else if self.skip("%") {
                format!("__mod__({written}, {})", self.power()?)
            } else if self.skip("//") {
                format!("{written} // {}", self.power()?)
            } else if self.skip("/") {
                format!("{written} / {}", self.power()?)
            } else {
                return Ok(written);
            };
        }
    }

    fn power(&mut self) -> Translation {
        let mut written = self.signed(true)?;
        while self.skip("**") {
            written = format!("{written} ** {}", self.signed(true)?);
        }
        Ok(written)
    }

    fn signed(&mut self, with_filters: bool) -> Translation {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Unread);
        }
        let written = if self.skip("-") {
            format!("(-{})", self.signed(false)?)
        } else if self.skip("+") {
            format!("__pos__({})", self.signed(false)?)
        } else {
            self.primary()?
        };
        self.depth -= 1;
        let written = self.postfix(written)?;
        if with_filters { self.filtered(written) } else { Ok(written) }
    }

    fn primary(&mut self) -> Translation {
        let lexeme = self.next()?;
        match (lexeme.kind, lexeme.text) {
            (LexemeKind::Name, name) => Ok(name.to_owned()),
            (LexemeKind::Number, _) => Ok(lexeme.written()),
            (LexemeKind::Text, _) => {
                let mut text = lexeme.value();
                while let Some(next) = self.peek().filter(|next| next.kind == LexemeKind::Text) {
                    text.push_str(&next.value());
                    self.at += 1;
                }
                Ok(super::lexer::quoted(&text))
            }
            (LexemeKind::Sign, "(") => {
                if self.skip(")") {
                    return Ok("()".into());
                }
                let first = self.expression()?;
                let inside = if self.is(",") { self.tuple_from(first)? } else { format!("({first})") };
                self.expect(")").map(|()| inside)
            }
            (LexemeKind::Sign, "[") => {
                let mut items = Vec::new();
                while !self.skip("]") {
                    items.push(self.expression()?);
                    if !self.is("]") {
                        self.expect(",")?;
                    }
                }
                Ok(format!("[{}]", items.join(", ")))
            }
            (LexemeKind::Sign, "{") => {
                let mut items = Vec::new();
                while !self.skip("}") {
                    let key = self.expression()?;
                    self.expect(":")?;
                    items.push(format!("{key}: {}", self.expression()?));
                    if !self.is("}") {
                        self.expect(",")?;
                    }
                }
                // two adjacent braces would end a tag
                Ok(format!("{{{} }}", items.join(", ")))
            }
            (LexemeKind::Sign, _) => Err(Unread),
        }
    }

    fn postfix(&mut self, mut written: String) -> Translation {
        loop {
            written = if self.skip(".") {
                let lexeme = self.next()?;
                match lexeme.kind {
                    LexemeKind::Number => format!("{written}[{}]", lexeme.written()),
                    LexemeKind::Name if METHODS.contains(&lexeme.text) && !self.is("(") => {
                        format!("__attr__({written}, '{}')", lexeme.text)
                    }
                    LexemeKind::Name => format!("{written}.{}", lexeme.text),
                    LexemeKind::Text | LexemeKind::Sign => return Err(Unread),
                }
            } else if self.skip("[") {
                self.subscript(&written)?
            } else if self.is("(") {
                format!("{written}{}", self.arguments()?)
            } else {
                return Ok(written);
            };
        }
    }

    fn subscript(&mut self, of: &str) -> Translation {
        let mut parts = Vec::new();
        let mut colons = 0;
        let mut part = None;
        while !self.skip("]") {
            if self.skip(":") {
                colons += 1;
                parts.push(part.take().unwrap_or_else(|| "none".into()));
            } else if part.is_none() {
                part = Some(self.tuple()?);
            } else {
                return Err(Unread);
            }
        }
        match (colons, part) {
            (0, Some(key)) => Ok(format!("{of}[{key}]")),
            (1 | 2, last) => {
                parts.push(last.unwrap_or_else(|| "none".into()));
                parts.resize(3, "none".into());
                Ok(format!("__slice__({of}, {})", parts.join(", ")))
            }
            _ => Err(Unread),
        }
    }

    fn arguments(&mut self) -> Translation {
        self.expect("(")?;
        let mut arguments = Vec::new();
        while !self.skip(")") {
            if !arguments.is_empty() {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            let is_named = self.lexemes.get(self.at + 1).is_some_and(|next| next.is_sign("="));
            arguments.push(if self.skip("**") {
                format!("**{}", self.expression()?)
            } else if self.skip("*") {
                format!("*{}", self.expression()?)
            } else if is_named {
                let name = self.name()?;
                self.expect("=")?;
                format!("{name}={}", self.expression()?)
            } else {
                self.expression()?
            });
        }
        Ok(format!("({})", arguments.join(", ")))
    }

    /// The name of a filter, and its arguments.
    fn filter_call(&mut self) -> Translation {
        let mut written = self.name()?.to_owned();
        while self.skip(".") {
            written = format!("{written}.{}", self.name()?);
        }
        if self.is("(") {
            written.push_str(&self.arguments()?);
        }
        Ok(written)
    }

    fn filters(&mut self, mut written: String) -> Translation {
        while self.skip("|") {
            written = format!("{written} | {}", self.filter_call()?);
        }
        Ok(written)
    }

    /// Filters and tests behind a value.
    fn filtered(&mut self, mut written: String) -> Translation {
        loop {
            written = if self.skip("|") {
                format!("{written} | {}", self.filter_call()?)
            } else if self.skip_name("is") {
                let not = if self.skip_name("not") { "not " } else { "" };
                let name = self.name()?;
                format!("({written} is {not}{name}{})", self.test_arguments()?)
            } else if self.is("(") {
                format!("{written}{}", self.arguments()?)
            } else {
                return Ok(written);
            };
        }
    }

    /// The argument of a test may be written without parentheses.
    fn test_arguments(&mut self) -> Translation {
        let Some(next) = self.peek() else { return Ok(String::new()) };
        let begins = match next.kind {
            LexemeKind::Name => {
                !["else", "or", "and", "is", "if", "in", "not", "recursive"].contains(&next.text)
            }
            LexemeKind::Number | LexemeKind::Text => true,
            LexemeKind::Sign => ["[", "{"].contains(&next.text),
        };
        if next.is_sign("(") {
            return self.arguments();
        }
        if !begins {
            return Ok(String::new());
        }
        let argument = self.primary()?;
        Ok(format!("({})", self.postfix(argument)?))
    }
}
