-- Whether a change is one of the document, and not of its status alone. The scheduler reads the documents of allocations
-- when they are new or were edited: annotations may change, and there are many changes of which it needs no document.
ALTER TABLE change ADD COLUMN edited boolean NOT NULL DEFAULT false;
