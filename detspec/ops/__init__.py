"""Operations in which the bits of a row do not depend on the number of other rows."""
